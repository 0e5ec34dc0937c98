"""The pictures of the documentation: trainings, drawn and photographed."""
