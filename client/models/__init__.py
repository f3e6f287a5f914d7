"""The networks that clients train, vision and language, and the losses that they minimise."""
