"""The engine process: its streams, requests and lifetime.  No torch here."""
