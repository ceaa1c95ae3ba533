"""Runs untrusted code of model authors, chat templates and tokenizers, in a process that can be killed.

A template can loop forever or multiply a text until memory is full, and so can a tokenizer's normaliser or regular
expression; neither can be interrupted in-process. `child` is the process, `process` the engine's interface to it; the
window has its own to count tokens. No torch.
"""
