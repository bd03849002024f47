"""`multibn check`: test results and measure times on ranks that the user has launched."""
