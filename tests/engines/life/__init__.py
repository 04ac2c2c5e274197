"""A request's life in real vLLM schedulers, by theme. Engines are shared by all tests of this folder."""
