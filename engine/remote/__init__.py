"""Machines other than this one that answer chats and jobs."""
