"""Models in GGUF files, as llama.cpp, Ollama and LM Studio have them: a file is read as the folder of a model."""
