"""Pieces of the decoder, one idea a file; model.py puts them together. Letters as there."""
