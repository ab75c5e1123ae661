"""What `pagedkv doctor` looks at: facts gathered topic by topic, and findings made of them by small pure functions.

findings    what a person should know: how bad, what, why, and the command that mends it
system      system, processor, memory and limits, from files below a root that tests replace
torch       torch, imported in a child process;  torch_child: what that process runs
packages    versions against what is required, and against the pairs in known.toml
variables   environment variables, misspelt ones included
backends    what each backend says of itself, and which would be chosen
model       whether a model fits
privacy     a report without personal paths, names or tokens
report      all of it
"""
