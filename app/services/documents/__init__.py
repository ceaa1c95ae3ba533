"""Documents in chats: read apart, kept in pieces in an index of their own, and found again by what is asked."""

from app.services.documents.prompts import Asked, Given, given_tokens
from app.services.documents.service import Documents

__all__ = ["Asked", "Documents", "Given", "given_tokens"]
