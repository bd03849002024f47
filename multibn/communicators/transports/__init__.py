"""How bytes move between processes: one file for each library that moves them."""
