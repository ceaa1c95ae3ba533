"""Makes the packages that people download: wheels, and programs with a Python of their own for each system."""
