"""Training runs, faulty and healthy, and how well their diagnosis is right."""
