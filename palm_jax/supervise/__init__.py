"""A run that is started again when it ends before its time.

The command that a person gives becomes the keeper: it starts the training process, hears its
news, passes signals on, and says in one line what XLA says in pages when another process is
lost. With --supervise it also ends what hangs and starts what ended. The keeper never imports
JAX, so nothing that ends a training process ends it.
"""
