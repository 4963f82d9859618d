"""Train a language model the PaLM way, and replay any step of it bit for bit.

Importing the package imports nothing else: device counts and thread pools must be set
before JAX starts.
"""

__version__ = "0.1.0"
