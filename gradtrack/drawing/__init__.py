"""The toolkit of the pictures, on matplotlib."""
