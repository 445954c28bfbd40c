"""Trainings under a guard on a GPU: the peak that the guard predicted, and the one that was reached."""
