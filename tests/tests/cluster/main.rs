mod leaks;
