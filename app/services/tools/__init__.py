"""Tools that chats may offer to models: those built in, and those of MCP servers that the user added."""
