"""Hit rate and predicted speed at every size of the expert cache, with a handle to choose one."""
