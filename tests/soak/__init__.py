"""Many saves with nodes that go and come: does anything grow?"""
