"""Losses and the formulae they are made of."""
