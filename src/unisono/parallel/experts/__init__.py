"""The expert axis: the experts of a layer are spread over ranks, and rows go to their experts and back."""
