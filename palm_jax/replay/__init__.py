"""Going back to a step of a run: replays, and branches that depart from it."""
