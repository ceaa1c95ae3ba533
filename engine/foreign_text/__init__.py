"""What a model's makers wrote that runs as a program: chat templates and tokenizers, in a process that can be stopped.

A template can loop for ever or multiply a text until memory is full, and so can the normaliser or the regular
expression of a tokenizer; none of that can be interrupted where it runs.  `child` is the process, `process` is how the
engine uses it; the window has one of its own to count tokens.  No torch.
"""
