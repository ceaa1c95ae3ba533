"""An HTTP server through which other programs use the model: OpenAI's, Anthropic's and Ollama's interfaces."""
