"""What `report.py` puts together: files as values, tables, plots, the page and its reader."""
