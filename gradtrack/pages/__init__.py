"""Pictures, the HTML report and the terminal view."""
