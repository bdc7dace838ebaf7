"""The papers: published values against closed forms and simulation; `checks` tells it."""
