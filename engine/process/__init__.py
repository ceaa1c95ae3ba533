"""Parts of the engine process: its streams, its requests, its end.  No torch here."""
