"""Documents -> tokens -> packed shards and a manifest; and reading them back.

sources.py gives documents, tokenizers.py turns them into tokens, prepare.py shuffles, splits
and packs these, manifest.py says what came out, bigram.py measures how predictable it is, and
reader.py opens the result (arrays.py: .npy files without evaluating anything). corpora.py opens
several as one, and joint.py is their manifest.
"""
