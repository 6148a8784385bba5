"""Smaller files of a model: which tensor gets which type, by what importance, written as a stream."""
