"""Tools that models may call in chats: those of our own, MCP servers, and the loop around them."""
