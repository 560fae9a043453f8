"""What training needs around attention: batches, losses, replaced and compiled attention."""
