"""From a prompt to an answer: the prompt's tokens, forwards over a cache, how tokens are chosen, and what ends them."""
