"""What a request must compute and move, how long that takes at the least, and what share of it a record reached.

`work` has the terms and the floor, `dit` and `codec` the model's arithmetic, `plan` a target's stages and totals,
`observed` a record's shares. Sizes and ceilings are data of `config.architecture` and `config.ceilings`.
"""
