"""Downloads of models: begun in the window or the terminal, gone on with by either, whatever happens in between."""
