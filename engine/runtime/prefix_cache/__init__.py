"""The prefix cache beyond pages: what was computed of prompts and answers, by content, in RAM and on disk."""
