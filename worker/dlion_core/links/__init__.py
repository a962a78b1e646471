"""State machines of the links between workers, without I/O.

`framing` splits messages into chunks and checks them, `send_queue` holds what waits for a link,
`handshake` decides when a link is up, and `deadline` adapts the time-out of a silent link.
"""
