"""The window: Qt front end of Switchyard.  Never imports torch or transformers."""
