"""Watch: the measured memory compared with the prediction; and recovery when memory runs out after all."""
