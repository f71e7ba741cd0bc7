"""What is said: messages, calls and answers in one form, whatever dialect a client speaks."""
