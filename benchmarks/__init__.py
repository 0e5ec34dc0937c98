"""What gradtrack costs, side by side with its peers in one process: ratios, never seconds."""
