"""Policy `staged`: sensors send features of a frozen encoder, and one worker trains the decoder.

`feature_batch` codes features, `collection` holds what the decoder has of one sensor, and
`machines` decides what is requested and sent. The encoder itself is in
`dlion_worker.training.staged.encoding`.
"""
