"""What was computed of prompts and answers, kept by content: in RAM, and on disk for the next start."""
