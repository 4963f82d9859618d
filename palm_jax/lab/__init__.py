"""Experiments on a run's own states: what would another choice do here?"""
