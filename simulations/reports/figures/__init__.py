"""Figures for papers, one file for each kind."""
