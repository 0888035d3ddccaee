"""The commands: arguments in, work done by the other rooms, text or JSON out."""
