"""What is to be computed: sizes, masks, and which rank owns which token."""
