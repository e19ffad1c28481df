"""Small checkpoints that other libraries wrote, the program that they trained, and the script that wrote them."""
