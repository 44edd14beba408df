"""The target model: a forward over a tree, the commit of a path, and what can be a target."""
