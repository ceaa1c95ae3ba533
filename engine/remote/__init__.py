"""Machines other than this one that answer chats and jobs: servers with OpenAI's interface, and clusters."""
