"""One pass over every gradient: tables of parameters, engines, sums."""
