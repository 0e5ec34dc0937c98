"""The reference pages of the documentation, written from the code: `python -m reference`."""
