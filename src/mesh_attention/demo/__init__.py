"""The demonstration: nine real ranks on one computer, three assignments, checked and counted."""
