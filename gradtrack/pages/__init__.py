"""Views of a run read from its directory: pictures, the HTML report, the comparison and the terminal."""
